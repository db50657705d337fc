/* SPDX-License-Identifier: Apache-2.0 */
/* Reading from donors alone, or from the quicker source: which way gets more pages read. */
#include "engine/state/pace.h"

/* Stretches between two trials. */
#define PAUSE_MIN 4u
#define PAUSE_MAX 256u
/* Without a read for longer than this, the job had something else to do. */
#define GAP_NS 1000000u
/* The quicker source wins when its stretch takes less than MARGIN_LESS / MARGIN of the donors'. */
#define MARGIN      4u
#define MARGIN_LESS 3u
/* With fewer pages than one in so many from the backup, both ways are the same. */
#define SAME 16u

static bool wins(uint32_t kept, uint64_t kept_ns, uint64_t trial_ns)
{
	return kept == ISWI_PACE_DONORS ? trial_ns * MARGIN < kept_ns * MARGIN_LESS
					: trial_ns <= kept_ns;
}

static uint32_t other(uint32_t way)
{
	return way == ISWI_PACE_DONORS ? ISWI_PACE_QUICKER : ISWI_PACE_DONORS;
}

/* pages: fewer than a stretch's, if a trial is lost. Returns the way of the next stretch. */
static uint32_t next_way(struct iswi_pace *p, uint32_t way, uint32_t pages, uint64_t ns, bool same)
{
	uint64_t kept_ns = atomic_load_explicit(&p->kept_ns, memory_order_relaxed);
	uint64_t stretch_ns = ns * ISWI_PACE_PAGES / pages;
	uint32_t kept = atomic_load_explicit(&p->kept, memory_order_relaxed);

	if (way != kept) {
		bool won = pages >= ISWI_PACE_PAGES && !(same && way == ISWI_PACE_QUICKER) &&
			   wins(kept, kept_ns, stretch_ns);

		kept = won ? way : kept;
		atomic_store_explicit(&p->kept, kept, memory_order_relaxed);
		p->pause = won ? PAUSE_MIN : ISWI_MIN(p->pause * 2, PAUSE_MAX);
		p->left = p->pause;
		return kept;
	}
	if (same && way == ISWI_PACE_QUICKER)
		return way;
	p->pause = ISWI_MAX(p->pause, PAUSE_MIN);
	if (!p->left)
		p->left = p->pause;
	if (--p->left)
		return way;
	atomic_store_explicit(&p->kept_ns, stretch_ns, memory_order_relaxed);
	return other(way);
}

static void end_stretch(struct iswi_pace *p, uint32_t way, uint32_t pages, uint64_t busy_ns)
{
	uint32_t from_backup = atomic_load_explicit(&p->backup_pages, memory_order_relaxed);
	uint32_t next;

	if (atomic_flag_test_and_set_explicit(&p->ending, memory_order_acquire))
		return;
	/* Another thread may have ended it since. */
	if (atomic_load_explicit(&p->pages, memory_order_relaxed) >= pages &&
	    atomic_load_explicit(&p->way, memory_order_relaxed) == way) {
		next = next_way(p, way, pages, busy_ns, from_backup * SAME < pages);
		atomic_store_explicit(&p->pages, 0, memory_order_relaxed);
		atomic_store_explicit(&p->backup_pages, 0, memory_order_relaxed);
		atomic_store_explicit(&p->busy_ns, 0, memory_order_relaxed);
		atomic_store_explicit(&p->way, next, memory_order_relaxed);
	}
	atomic_flag_clear_explicit(&p->ending, memory_order_release);
}

void iswi_pace_note(struct iswi_pace *p, uint32_t pages, bool from_backup, uint64_t now_ns)
{
	uint32_t way = atomic_load_explicit(&p->way, memory_order_relaxed);
	uint64_t last_ns = atomic_exchange_explicit(&p->last_ns, now_ns, memory_order_relaxed);
	uint64_t gap_ns = now_ns > last_ns ? ISWI_MIN(now_ns - last_ns, GAP_NS) : 0;
	uint64_t busy_ns, kept_ns = atomic_load_explicit(&p->kept_ns, memory_order_relaxed);
	uint32_t all, kept = atomic_load_explicit(&p->kept, memory_order_relaxed);

	busy_ns = atomic_fetch_add_explicit(&p->busy_ns, gap_ns, memory_order_relaxed) + gap_ns;
	if (from_backup)
		atomic_fetch_add_explicit(&p->backup_pages, pages, memory_order_relaxed);
	all = atomic_fetch_add_explicit(&p->pages, pages, memory_order_relaxed) + pages;
	/* Only a trial has a stretch to be compared with; one that cannot win ends at once. */
	if (all >= ISWI_PACE_PAGES || (way != kept && !wins(kept, kept_ns, busy_ns)))
		end_stretch(p, way, all, busy_ns);
}
