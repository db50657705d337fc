/* SPDX-License-Identifier: Apache-2.0 */
/*
 * When far memory pauses. A program that touches single pages all over more blocks than there is
 * room for is helped by no grain: a block brings what nobody wants and drives out what is wanted,
 * and a page alone costs more than one from swap, for which the kernel has all of the room besides.
 * So where nearly all fetches have been of such pages for a while, eviction stops. What the program
 * touches comes home by blocks, and the kernel swaps as it does for any program.
 *
 * The pause ends when hardly anything has come back for a while, since what is touched fits or is
 * something else by now; at the latest after a time that doubles whenever the same begins again
 * soon, so that a program that does nothing else is hardly ever tried again. Not where swap has no
 * room for what would come home, nor beside other processes with much far memory: what the kernel
 * brings back for the one would look to the others as if they had too much, and they would give it
 * all up.
 */
#include "far/blocks.h"

/*
 * To bring home all that is away, and to swap out as much, takes about as long as this share of its
 * pages one by one. With fewer strays than that a pause might cost more than it saves.
 */
#define STRAYS_SHARE 2u
/* Of each such time: so many strays more than there are fetches in order, which count for more. */
#define STRAYS_NS     2000000000ull
#define STRAYS_MIN    2048
#define ORDERLY       4
#define PAUSE_NS_MIN  8000000000ull /* bringing home and swapping out take some of it */
#define PAUSE_NS_MAX  128000000000ull
#define SOON_PAUSES   2u
#define CALM_SHARE    8u /* of the pause, in which hardly anything comes back: then it ends */
#define SWAP_LEFT_MIN (32 * (uint64_t)ISWF_BLOCK_PAGES)

#define A (&iswf_agent)

static bool may_pause(uint64_t more_pages)
{
	return atomic_load(&A->others) == 0 && !A->swap_is_limited &&
	       A->ops->free_swap_pages() >= SWAP_LEFT_MIN + more_pages;
}

static void begin(uint64_t now)
{
	bool again = A->pause_ns != 0 && now - A->paused_until_ns < SOON_PAUSES * A->pause_ns;

	A->pause_ns = !again                           ? PAUSE_NS_MIN
		      : A->pause_ns < PAUSE_NS_MAX / 2 ? 2 * A->pause_ns
						       : PAUSE_NS_MAX;
	A->pause_began_ns = A->pause_counted_ns = now;
	A->paused_until_ns = now + A->pause_ns;
	A->overfull = true;
	iswf_count(&A->count.pauses, 1);
}

static void count(bool is_stray, uint64_t now)
{
	if (now - A->strays_since_ns > STRAYS_NS) {
		if (A->strays_net < STRAYS_MIN)
			A->strays = 0;
		A->strays_since_ns = now;
		A->strays_net = 0;
	}
	A->strays += is_stray;
	A->strays_net += is_stray ? 1 : -ORDERLY;
}

static bool are_enough(void)
{
	return A->strays_net >= STRAYS_MIN && A->strays >= A->count.pages_away / STRAYS_SHARE;
}

bool iswf_fetch_pauses(bool is_stray)
{
	uint64_t now = iswf_now_ns();

	if (iswf_is_paused(now))
		return true;
	count(is_stray, now);
	if (!are_enough())
		return false;
	A->strays = 0;
	A->strays_net = 0;
	if (may_pause(A->count.pages_away))
		begin(now);
	return iswf_is_paused(now);
}

void iswf_pause_look(uint64_t now, uint64_t back_ns)
{
	uint64_t end = now < A->paused_until_ns ? now : A->paused_until_ns;
	uint64_t since = back_ns > A->pause_began_ns ? back_ns : A->pause_began_ns;

	if (end > A->pause_counted_ns) {
		iswf_count(&A->count.pause_ns, end - A->pause_counted_ns);
		A->pause_counted_ns = end;
	}
	/* A pause may have begun after the caller had looked at the clock. */
	if (A->overfull &&
	    (!may_pause(0) || (now > since && now - since > A->pause_ns / CALM_SHARE)))
		A->paused_until_ns = now;
	if (A->overfull && !iswf_is_paused(now))
		A->overfull = A->held_pages > A->budget_pages && may_pause(0);
}
