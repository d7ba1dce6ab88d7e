"""The fuzzer: files and options that are changed at random, and readers that must return or raise an FmwcError."""
