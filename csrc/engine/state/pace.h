/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Whether a busy device reads more pages a second from its donors alone, or from whichever source
 * is the quicker for each read (state/speed.h). While several requests are in flight, the time that
 * a source takes for one says little of that: on a host whose processors are full, a read of the
 * disk may end sooner and yet leave less processor time for all the others.
 *
 * So both ways are tried by turns, a stretch of PACE_PAGES each, and the better one is kept. It is
 * tried against the other again after a pause, which doubles whenever it wins. Donors win a tie,
 * and a little more.
 */
#ifndef ISWI_STATE_PACE_H
#define ISWI_STATE_PACE_H

#include "util/util.h"

#define ISWI_PACE_PAGES 256u

enum iswi_pace_way { ISWI_PACE_DONORS, ISWI_PACE_QUICKER };

/* Zeroed: donors, and a first trial soon. */
struct iswi_pace {
	atomic_uint way; /* of this stretch */
	/* Of this stretch, relaxed: guesses, as in state/speed.h. */
	atomic_uint pages, backup_pages;
	atomic_uint_fast64_t last_ns, busy_ns;
	atomic_flag ending;
	/* Of the thread that ends a stretch. */
	uint32_t pause, left;
	atomic_uint kept;             /* the way that is not on trial */
	atomic_uint_fast64_t kept_ns; /* of the stretch before a trial */
};

static inline bool iswi_pace_is_donors(const struct iswi_pace *p)
{
	return atomic_load_explicit(&p->way, memory_order_relaxed) == ISWI_PACE_DONORS;
}
/* A read of so many pages was begun while others were in flight. Any thread; never waits. */
void iswi_pace_note(struct iswi_pace *p, uint32_t pages, bool from_backup, uint64_t now_ns);

#endif
