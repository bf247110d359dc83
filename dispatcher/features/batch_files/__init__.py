"""Batch files in the format of OpenAI's batch API: check the lines, submit them, and write the answers.

A run can be interrupted at any moment, because data becomes durable in this order:

1. The whole input is checked. The journal then holds which lines are sent, and in which order.
2. A chunk of lines is written to the journal before it is submitted. The queue remembers each chunk by its
   reply key, so a chunk that is submitted again runs only once.
3. Results move from their list into the keep, in Redis. Their lines are written to the files and flushed to
   the disk. Then the journal records the lengths of the files and which lines are done. Then the results are
   deleted from the keep.

After a crash, the files are cut to the lengths in the journal, and the keep still holds the results of the
missing lines.
"""
