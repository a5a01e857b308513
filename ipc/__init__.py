"""What crosses process borders: messages, codec, sockets, clients."""
