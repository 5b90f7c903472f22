"""A pager for the virtual card in the place of comfy-aimdo, which needs a real one: the same interface, with torch's own tensors.

Weights are paged in one by one up to a limit for each process, and whatever does not fit is cast anew in each forward, as aimdo
does it. Every call is noted with its thread.
"""
