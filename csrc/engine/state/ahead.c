/* SPDX-License-Identifier: Apache-2.0 */
/* Pages read ahead: where they are, who waits for them, and what outdates them. */
#include <string.h>

#include "engine/state/ahead.h"
#include "engine/state/op.h"

static struct iswi_ahead_group *find(struct isw_engine *e, uint64_t page)
{
	for (uint32_t i = iswi_shard_of(e, page)->ahead; i != ISWI_NONE;
	     i = e->ahead->groups[i].next) {
		struct iswi_ahead_group *g = &e->ahead->groups[i];

		if (g->group == page / ISWI_GROUP_PAGES && g->pages & iswi_ahead_bit(page))
			return g;
	}
	return NULL;
}

bool iswi_ahead_has(struct isw_engine *e, uint64_t page)
{
	return find(e, page);
}

static void hand_over(const struct iswi_ahead_group *g, struct iswi_req *req, uint64_t page)
{
	memcpy(iswi_opened_at(req, page), iswi_ahead_data(g, page), ISW_PAGE_BYTES);
}

static bool join(struct iswi_ahead_group *g, struct iswi_req *req, uint64_t page)
{
	struct iswi_ahead_wait *last = g->waits_count ? &g->waits[g->waits_count - 1] : NULL;

	if (last && last->req == req && last->page + last->pages == page) {
		last->pages++;
		return true;
	}
	if (g->waits_count == ISWI_AHEAD_WAITS)
		return false;
	g->waits[g->waits_count++] = (struct iswi_ahead_wait){req, page, 1};
	atomic_fetch_add_explicit(&req->pending, 1, memory_order_relaxed);
	return true;
}

enum iswi_ahead_found iswi_ahead_get(struct isw_engine *e, struct iswi_req *req, uint64_t page)
{
	struct iswi_ahead_group *g = find(e, page);

	if (!g)
		return ISWI_AHEAD_NOT;
	if (g->reading && g->slow)
		return ISWI_AHEAD_SLOW;
	if (g->reading)
		return join(g, req, page) ? ISWI_AHEAD_JOINED : ISWI_AHEAD_NOT;
	hand_over(g, req, page);
	g->pages &= ~iswi_ahead_bit(page);
	return ISWI_AHEAD_HAD;
}

void iswi_ahead_drop(struct isw_engine *e, uint64_t page)
{
	struct iswi_ahead_group *g = find(e, page);

	if (!g)
		return;
	g->pages &= ~iswi_ahead_bit(page);
	iswi_count(&e->count.pages_ahead_wasted, 1);
}

void iswi_ahead_list(struct isw_engine *e, struct iswi_ahead_group *g, uint64_t number,
		     uint32_t pages)
{
	struct iswi_shard *shard = iswi_shard_of(e, number * ISWI_GROUP_PAGES);

	g->group = number;
	g->pages = pages;
	g->reading = true;
	g->slow = false;
	g->listed = true;
	g->next = shard->ahead;
	shard->ahead = (uint32_t)(g - e->ahead->groups);
}

void iswi_ahead_unlist(struct isw_engine *e, struct iswi_ahead_group *g)
{
	uint32_t index = (uint32_t)(g - e->ahead->groups);
	uint32_t *link = &iswi_shard_of(e, g->group * ISWI_GROUP_PAGES)->ahead;

	while (*link != index)
		link = &e->ahead->groups[*link].next;
	*link = g->next;
	g->listed = false;
	iswi_count(&e->count.pages_ahead_wasted, (uint32_t)__builtin_popcount(g->pages));
	g->pages = 0;
}

uint32_t iswi_ahead_release(struct iswi_ahead_group *g, struct iswi_ahead_wait *waits_out)
{
	uint32_t count = g->waits_count;

	memcpy(waits_out, g->waits, count * sizeof(*waits_out));
	g->waits_count = 0;
	return count;
}

uint32_t iswi_ahead_rest(struct iswi_ahead_group *g, struct iswi_ahead_wait *waits_out,
			 uint32_t *missing_out)
{
	uint32_t count = iswi_ahead_release(g, waits_out), had = 0;

	g->reading = false;
	for (uint32_t w = 0; w < count; w++) {
		const struct iswi_ahead_wait *wait = &waits_out[w];

		missing_out[w] = 0;
		for (uint64_t page = wait->page; page < wait->page + wait->pages; page++) {
			if (g->pages & iswi_ahead_bit(page)) {
				hand_over(g, wait->req, page);
				had |= iswi_ahead_bit(page);
			} else {
				missing_out[w] |= iswi_ahead_bit(page);
			}
		}
	}
	g->pages &= ~had;
	return count;
}
