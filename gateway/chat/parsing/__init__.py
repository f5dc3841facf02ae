"""Takes models' answers apart: one parser per form that models write thoughts and calls in, and how one is found."""
