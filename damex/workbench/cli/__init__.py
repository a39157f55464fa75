"""Arguments and help of all commands, without importing torch or mmengine."""
