"""What single families of models do in a way of their own, each a few lines; most need none of it."""
