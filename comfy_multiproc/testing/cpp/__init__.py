"""The virtual card in C++: a torch device of its own, for ComfyUI as it is."""
