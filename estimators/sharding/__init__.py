"""Which parameters form a group and which rows a rank holds of them."""
