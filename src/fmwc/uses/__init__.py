"""Uses of confidence: filtering with or without a guarantee, editing, rewinding, best of n, guidance and heads."""
