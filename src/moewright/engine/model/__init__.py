"""The model: plain modules that run alone as well as inside any layout."""
