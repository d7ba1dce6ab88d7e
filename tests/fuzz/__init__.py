"""Fuzzing: files and options are changed at random; their readers must return or raise an FmwcError."""
