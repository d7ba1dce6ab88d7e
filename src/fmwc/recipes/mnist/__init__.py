"""The paper's second setting: class-conditional digits, judged by a classifier."""
