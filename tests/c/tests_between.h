/* SPDX-License-Identifier: Apache-2.0 */
/* Tests that all need the same thing: it is there when one begins, and taken down behind it. */
#ifndef ISW_TEST_TESTS_BETWEEN_H
#define ISW_TEST_TESTS_BETWEEN_H

#include "tests.h"

#define BETWEEN_TEST(name, begin, end)                                                             \
	static void in_##name(void);                                                               \
	TEST(name)                                                                                 \
	{                                                                                          \
		begin;                                                                             \
		in_##name();                                                                       \
		end;                                                                               \
	}                                                                                          \
	static void in_##name(void)

#endif
