"""The studio: pages in a browser on this machine, over the Python interface.

It needs the extra `moewright[studio]` (starlette, uvicorn); nothing else imports it.
"""
