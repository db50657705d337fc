/* SPDX-License-Identifier: Apache-2.0 */
/* What the small C test programs share. Exit status: 0 passed, 1 failed, 77 skipped. */
#ifndef ISW_TEST_CHECK_H
#define ISW_TEST_CHECK_H

#include <stdio.h>
#include <stdlib.h>

#define CHECK(condition)                                                                           \
	do {                                                                                       \
		if (!(condition)) {                                                                \
			fprintf(stderr, "%s:%d: not true: %s\n", __FILE__, __LINE__, #condition);  \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

/* Both sides as signed 64-bit numbers: shows what they were. */
#define CHECK_EQ(got, want)                                                                        \
	do {                                                                                       \
		long long got_ = (long long)(got), want_ = (long long)(want);                      \
		if (got_ != want_) {                                                               \
			fprintf(stderr, "%s:%d: %s is %lld, not %lld\n", __FILE__, __LINE__, #got, \
				got_, want_);                                                      \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

/* What the call has said in its struct isw_error is shown. */
#define CHECK_OK(call, error)                                                                      \
	do {                                                                                       \
		if (call) {                                                                        \
			fprintf(stderr, "%s:%d: %s\n", __FILE__, __LINE__, (error).text);          \
			exit(1);                                                                   \
		}                                                                                  \
	} while (0)

#define SKIP(reason)                                                                               \
	do {                                                                                       \
		fprintf(stderr, "skipped: %s\n", reason);                                          \
		exit(77);                                                                          \
	} while (0)

#endif
