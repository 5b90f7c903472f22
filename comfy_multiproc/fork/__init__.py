"""Finding an upstream ComfyUI tree and turning it into the fork."""
