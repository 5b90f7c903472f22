raise RuntimeError("this is not ComfyUI's utils")
