"""Neural-network layers. The letters that name array axes have one meaning in the whole library:

B  batch rows: examples in training, inputs in generation   T  tokens; queries, where keys are another axis
S  keys that queries attend to                              D  model width
F  width inside the feed-forward network                    N  attention heads with their own keys
H  size of a query and key in one head                      U  size of a value in one head, if it is not H
L  layers                                                   V  vocabulary
G  sequences generated for each input: beams or samples     P  prompt tokens
K  heads of a decoding cache: N, or N · G if every sequence has its own keys
R  relative distances between a key and a query             C  image channels
Z  global tokens of LongT5, each the sum of a block of tokens

Transformer-VQ only:
M  codes in a codebook                                      Q  query heads that share one key head
W  window: past keys that a query sees individually         E  distances within the window, W + 1
J  blocks of queries                                        X  tokens in a block, so T = J · X
"""
