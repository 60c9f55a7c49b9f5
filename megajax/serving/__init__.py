"""Generation: cached decoding and sampling."""
