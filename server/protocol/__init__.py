"""The Responses dialect without any I/O: client frames and engine outputs in, server frames and actions out.

``connection.py`` holds the contract; nothing here knows asyncio, sockets or torch.
"""
