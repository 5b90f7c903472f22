"""A pack that cannot be imported."""

raise ImportError("zoo_broken needs a package that nobody has")
