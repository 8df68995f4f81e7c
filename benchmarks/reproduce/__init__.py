"""`make reproduce`: each paper's figures in its own setting, with the paper's headline beside ours."""
