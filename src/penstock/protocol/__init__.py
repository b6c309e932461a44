"""What an owner and its clients share: messages, the places where an owner is found, its report at the start."""
