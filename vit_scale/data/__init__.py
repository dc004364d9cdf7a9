"""Images from source to model: sources, sampling order, decoding, augmentation, mixing, loading."""
