"""The exact tier of the judge, judged."""
