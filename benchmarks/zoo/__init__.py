"""The zoo: small flows that nothing in the library was tuned on, each with a failure rule that no confidence sees."""
