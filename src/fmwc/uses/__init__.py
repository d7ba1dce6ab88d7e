"""Uses of confidence: filtering with or without a guarantee, editing, best of n, guidance and heads."""
