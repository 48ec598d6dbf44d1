"""Sockets and HTTP: a starlette application around the protocol, and the uvicorn server that runs it."""
