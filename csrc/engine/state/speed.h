/* SPDX-License-Identifier: Apache-2.0 */
/*
 * How soon a donor, or the backup, answers a read, and which of two is the quicker (R16).
 *
 * What a read takes depends on the pages that its source must move until it is answered: its own,
 * and those of the reads under way there. So each source has one expectation for each load, in
 * powers of two of pages. It moves by a quarter of the difference towards what a read took; what
 * takes more than twice as long as expected counts as twice. A read that is slow counts
 * before it is answered, with the time until then. With more load nothing is expected sooner.
 *
 * The slower source is measured by a read every now and then, which may have waited in vain for a
 * source that has become quicker. There is one such read at a time, and after one that took t none
 * for SPEED_MEASURE * t, or for SPEED_PAUSE_NS if that is less: what a read took may be the
 * page-out before it and not the source.
 */
#ifndef ISWI_STATE_SPEED_H
#define ISWI_STATE_SPEED_H

#include "util/util.h"

/* 1, 2, 3 to 4, 5 to 8, ... pages; the last one is all above 64. */
#define ISWI_SPEED_LOADS     8u
#define ISWI_SPEED_MEASURE   256u
#define ISWI_SPEED_PAUSE_NS  1000000000ull /* the longest one between two measurements */
#define ISWI_SPEED_FAILED_NS 1000000000ull /* what a read that failed took, at least */
#define ISWI_SPEED_UNDER_WAY UINT64_MAX

/* All relaxed: guesses, to which each thread contributes; a lost one does no harm. */
struct iswi_speed {
	atomic_uint pages;                              /* of reads under way */
	atomic_uint_fast64_t took_ns[ISWI_SPEED_LOADS]; /* expected at each load; 0: no idea */
	atomic_uint_fast64_t measure_ns; /* from then on it is measured, although the slower */
};

enum iswi_speed_choice {
	ISWI_SPEED_DONOR,
	ISWI_SPEED_DONOR_MEASURED, /* the slower, but it is time */
	ISWI_SPEED_BACKUP,
	ISWI_SPEED_BACKUP_MEASURED /* the slower, but it is time */
};

static inline bool iswi_speed_is_backup(enum iswi_speed_choice choice)
{
	return choice == ISWI_SPEED_BACKUP || choice == ISWI_SPEED_BACKUP_MEASURED;
}
/* Another source has this number now. Reads of the one before have ended. */
void iswi_speed_forget(struct iswi_speed *s);
/* A read of so many pages is under way; returns its load, for iswi_speed_took. */
uint8_t iswi_speed_begin(struct iswi_speed *s, uint32_t pages);
/* It has ended, well or not. */
void iswi_speed_end(struct iswi_speed *s, uint32_t pages);
/* It was answered well. */
void iswi_speed_took(struct iswi_speed *s, uint8_t load, uint64_t took_ns);
/* It has not been answered for so long. */
void iswi_speed_unanswered(struct iswi_speed *s, uint8_t load, uint64_t for_ns);
/* Longer than expected. */
bool iswi_speed_is_late(const struct iswi_speed *s, uint8_t load, uint64_t for_ns);
/* It failed: for a while only measurements ask that source. */
void iswi_speed_failed(struct iswi_speed *s, uint64_t took_ns);
/* When a read of so many pages would be answered, if it were sent now; 0: no idea. */
uint64_t iswi_speed_expected_ns(const struct iswi_speed *s, uint32_t pages);
/*
 * For pages that both have. A donor wins a tie, and a little more: the disk also has the backup's
 * writes to do. At a load at which it was never asked it is asked, unless it is slow even at a
 * smaller one.
 */
enum iswi_speed_choice iswi_speed_choose(const struct iswi_speed *donor,
					 const struct iswi_speed *backup, uint32_t pages,
					 uint64_t now_ns);
/*
 * The caller's read is to measure the source; false: another one does so already. When it has
 * ended, well or not, after having been sent at began_ns, iswi_speed_measured.
 */
bool iswi_speed_measure(struct iswi_speed *s, uint64_t now_ns);
void iswi_speed_measured(struct iswi_speed *s, uint64_t began_ns, uint64_t now_ns);

#endif
