"""Runner, hooks and checkpoints around mmengine."""
