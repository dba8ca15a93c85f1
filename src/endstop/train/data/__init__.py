"""Data: sources of documents and conversations, mixtures of them, rows packed out of them."""
