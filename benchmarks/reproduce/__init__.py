"""`make reproduce`: each paper's figures in its own setting, the paper's headline beside ours."""
