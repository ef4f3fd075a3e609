"""The networks of the paper's model appendix."""
