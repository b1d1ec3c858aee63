"""`decide` explored exhaustively on an abstract node: every step split into its effects, and a fault after each."""
