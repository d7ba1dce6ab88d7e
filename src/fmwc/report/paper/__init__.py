"""The paper's tables beside ours."""
