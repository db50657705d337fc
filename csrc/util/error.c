// SPDX-License-Identifier: Apache-2.0
#include "util/util.h"

#include <stdio.h>

int iswi_error(struct isw_error *error, int code, const char *format, ...)
{
	va_list args;

	if (error == NULL)
		return code;
	error->code = code;
	va_start(args, format);
	vsnprintf(error->text, sizeof(error->text), format, args);
	va_end(args);
	return code;
}
