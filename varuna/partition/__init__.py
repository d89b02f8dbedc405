"""User model to sections: capture, cut, split."""
