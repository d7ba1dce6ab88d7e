"""Cases in which the product was wrong without saying so. One file per kind of error; README.md has the table."""
