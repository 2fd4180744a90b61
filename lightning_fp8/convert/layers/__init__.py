"""The layers of a model as a recipe's policy counts them: linear layers, towers of blocks, output heads."""
