/* SPDX-License-Identifier: Apache-2.0 */
/* Sets of pages of one block. */
#include "far/agent.h"

uint32_t iswf_mask_count(const struct iswf_mask *mask)
{
	uint32_t n = 0;

	for (uint32_t i = 0; i < ISWF_WORDS; i++)
		n += (uint32_t)__builtin_popcountll(mask->word[i]);
	return n;
}

bool iswf_mask_any(const struct iswf_mask *mask)
{
	uint64_t any = 0;

	for (uint32_t i = 0; i < ISWF_WORDS; i++)
		any |= mask->word[i];
	return any != 0;
}

struct iswf_mask iswf_mask_range(uint32_t first, uint32_t end)
{
	struct iswf_mask mask;

	for (uint32_t i = 0; i < ISWF_WORDS; i++) {
		uint32_t from = i * 64, to = from + 64;
		uint64_t word = ~0ull;

		if (first >= to || end <= from) {
			mask.word[i] = 0;
			continue;
		}
		if (first > from)
			word &= ~0ull << (first - from);
		if (end < to)
			word &= ~0ull >> (to - end);
		mask.word[i] = word;
	}
	return mask;
}

struct iswf_mask iswf_mask_and(const struct iswf_mask *a, const struct iswf_mask *b)
{
	struct iswf_mask both;

	for (uint32_t i = 0; i < ISWF_WORDS; i++)
		both.word[i] = a->word[i] & b->word[i];
	return both;
}

struct iswf_mask iswf_mask_without(const struct iswf_mask *a, const struct iswf_mask *b)
{
	struct iswf_mask rest;

	for (uint32_t i = 0; i < ISWF_WORDS; i++)
		rest.word[i] = a->word[i] & ~b->word[i];
	return rest;
}

void iswf_mask_add(struct iswf_mask *mask, const struct iswf_mask *more)
{
	for (uint32_t i = 0; i < ISWF_WORDS; i++)
		mask->word[i] |= more->word[i];
}

void iswf_mask_take(struct iswf_mask *mask, const struct iswf_mask *less)
{
	*mask = iswf_mask_without(mask, less);
}

uint32_t iswf_mask_run(const struct iswf_mask *mask, uint32_t *first)
{
	uint32_t page = *first, end;

	while (page < ISWF_BLOCK_PAGES && !iswf_has(mask, page))
		page++;
	for (end = page; end < ISWF_BLOCK_PAGES && iswf_has(mask, end); end++)
		;
	*first = page;
	return end - page;
}

void iswf_mask_hull(const struct iswf_mask *mask, uint32_t *first_out, uint32_t *end_out)
{
	uint32_t first = 0, end = ISWF_BLOCK_PAGES;

	while (first < end && !iswf_has(mask, first))
		first++;
	while (end > first && !iswf_has(mask, end - 1))
		end--;
	*first_out = first;
	*end_out = end;
}
