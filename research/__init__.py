"""Studies, chaos and worlds that prove Heed to its makers. It imports the product, and is not in the wheel."""
