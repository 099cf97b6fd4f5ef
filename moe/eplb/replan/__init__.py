"""Plans from a placement that is there: the changes that pay, what a failure loses, how many spare slots to have."""
