"""The parts of the virtual card; `virtual.py` puts them together."""
