/* SPDX-License-Identifier: Apache-2.0 */
#include "engine/state/trend.h"

#include <stdbool.h>

/* A request so near to a stream's last one belongs to it. */
#define NEAR_PAGES 64u
/* A move over a larger gap is no vote: what lies between would be read in vain. */
#define GAP_PAGES 32u
#define MOVES_MIN 4u
#define MOVES_MAX 32u

static bool is_near(const struct iswi_stream *s, uint64_t page, uint64_t end)
{
	return s->end && page < s->end + NEAR_PAGES && s->page < end + NEAR_PAGES;
}

/* The smallest of the windows in which one direction has more than half of the moves. */
static int trend_of(const struct iswi_stream *s)
{
	for (uint32_t window = MOVES_MIN; window <= s->moves; window *= 2) {
		uint32_t mask = UINT32_MAX >> (MOVES_MAX - window);

		if ((uint32_t)__builtin_popcount(s->forward & mask) > window / 2)
			return 1;
		if ((uint32_t)__builtin_popcount(s->back & mask) > window / 2)
			return -1;
	}
	return 0;
}

static void move(struct iswi_stream *s, uint64_t page, uint64_t end)
{
	int before = s->trend;

	s->forward = s->forward << 1 | (page >= s->end && page - s->end < GAP_PAGES);
	s->back = s->back << 1 | (end <= s->page && s->page - end < GAP_PAGES);
	s->moves += s->moves < MOVES_MAX;
	s->page = page;
	s->end = end;
	s->trend = trend_of(s);
	if (s->trend != before)
		s->ahead = s->trend > 0 ? end : page;
}

struct iswi_stream *iswi_trend_note(struct iswi_stream *streams, uint32_t count, uint32_t now,
				    uint64_t page, uint64_t end)
{
	struct iswi_stream *oldest = streams;

	for (uint32_t i = 0; i < count; i++) {
		struct iswi_stream *s = &streams[i];

		if (is_near(s, page, end)) {
			move(s, page, end);
			s->used = now;
			return s;
		}
		if (now - s->used > now - oldest->used)
			oldest = s;
	}
	*oldest = (struct iswi_stream){
		.page = page,
		.end = end,
		.used = now,
	};
	return oldest;
}
