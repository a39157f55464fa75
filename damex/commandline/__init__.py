"""What one types: arguments and help of all commands, without torch or mmengine."""
