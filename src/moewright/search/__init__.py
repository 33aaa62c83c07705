"""The search over layouts: the space, the screening of all of it, and what explains the answer."""
