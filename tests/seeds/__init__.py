"""The scripts of the documents that this project answers, and scripts of our own beside them."""
