"""The use cases of the server, one module an actor."""
