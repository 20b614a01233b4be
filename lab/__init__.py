"""The paper's tables and figures on what anyone can run: each item's data, picture, and the published figure beside."""
