"""A trained model in the formats of others. What is written is loaded again and compared before it gets its name."""
