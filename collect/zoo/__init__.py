"""The models, one file a source; each registers its rows when imported, without importing the library."""
