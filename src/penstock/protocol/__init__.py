"""What an owner and its clients share: messages, how clients find an owner, and its report when it starts."""
